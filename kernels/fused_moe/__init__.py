from kernels.fused_moe.problem import FusedMoe

OP = FusedMoe()
