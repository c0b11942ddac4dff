from kernels.block_scale_gemm.problem import BlockScaleGemm

OP = BlockScaleGemm()
