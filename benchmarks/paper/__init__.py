"""The experiments of the EMO paper (arXiv 2310.04691): arms, measurements, reports."""
