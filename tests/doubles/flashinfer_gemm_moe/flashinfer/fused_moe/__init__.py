from ..tllm_enums import ActivationType as ActivationType
from ..tllm_enums import Fp8QuantizationType as Fp8QuantizationType
from ..tllm_enums import RoutingMethodType as RoutingMethodType
from ..tllm_enums import WeightLayout as WeightLayout
from .core import convert_to_block_layout as convert_to_block_layout
from .core import cutlass_fused_moe as cutlass_fused_moe
from .core import trtllm_fp8_block_scale_moe as trtllm_fp8_block_scale_moe
from .core import trtllm_fp8_block_scale_routed_moe as trtllm_fp8_block_scale_routed_moe
