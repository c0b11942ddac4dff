from kernels.mha_prefill.problem import MhaPrefill

OP = MhaPrefill()
