from kernels.mla_decode.problem import MlaDecode

OP = MlaDecode()
