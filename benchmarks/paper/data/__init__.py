"""Text, questions and labelled texts of the experiments, as documents and as rows of token ids."""
