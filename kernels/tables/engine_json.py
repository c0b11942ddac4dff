from kernels.tables import Found


class EngineTables:
    def __init__(self, engine, files, environment={}):
        pass

    def gemm(self, *a, **k):
        return Found("x", None, "default")

    moe = gemm

    def problems(self, t):
        return []
