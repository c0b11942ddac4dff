"""A double of tokenspeed-mla 2.0.4 (the wheel of PyPI): MLA decode on sm_100 and sm_103. Lines are those
of the wheel's files. vLLM 0.33.0 calls it in v1/attention/backends/mla/tokenspeed_mla.py:332, with FP8
only, pages of 32 or 64 tokens, every argument by its name, and a workspace of num_sm * heads * 8 * 513 * 4
bytes."""

from .mla_decode import tokenspeed_mla_decode as tokenspeed_mla_decode
from .utils import get_num_sm as get_num_sm
