"""Turn a corpus into Megatron's mmap files: read, tokenize, write, and resume if interrupted."""

from rapidformer.data.preprocess.run import preprocess
from rapidformer.data.preprocess.settings import PreprocessSettings
from rapidformer.data.preprocess.summary import Summary, format_summary

__all__ = ["PreprocessSettings", "Summary", "format_summary", "preprocess"]
