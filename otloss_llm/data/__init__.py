"""Text and questions for training: documents, tokenizers, blocks of token ids."""

from otloss_llm.data.blocks import PackedBlocks as PackedBlocks
from otloss_llm.data.blocks import train_bpe_tokenizer as train_bpe_tokenizer
from otloss_llm.data.text import read_texts as read_texts
from otloss_llm.data.text import split_documents as split_documents
