"""Turn a corpus into Megatron's mmap files: read, tokenize, write, and resume if interrupted."""

from rapidformer.data.preprocess.progress import Summary, format_summary
from rapidformer.data.preprocess.run import preprocess
from rapidformer.data.preprocess.settings import PreprocessSettings

__all__ = ["PreprocessSettings", "Summary", "format_summary", "preprocess"]
