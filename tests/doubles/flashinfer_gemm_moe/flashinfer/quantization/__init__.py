"""flashinfer/quantization/fp4_quantization.py shuffle_matrix_a; its row maps are in flashinfer/utils.py."""

import torch


def row_indices(rows: int, epilogue_tile_m: int) -> torch.Tensor:
    """[new row] -> old row."""
    block = 32 if epilogue_tile_m % 128 == 0 else 16
    assert rows % block == 0, f"input_tensor.shape[0] must be multiples of {block}"
    # srcToDstBlk16RowMap is 0, 8, 1, 9, ...: entry i is where row i goes.
    destination = torch.arange(block).view(block // 8, 8).T.flatten()
    old = torch.arange(rows)
    indices = torch.empty(rows, dtype=torch.long)
    indices[old // block * block + destination[old % block]] = old
    return indices


def shuffle_matrix_a(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    assert input_tensor.dim() == 2, f"input_tensor should be a 2D tensor, not {input_tensor.dim()}"
    return input_tensor[row_indices(input_tensor.shape[0], epilogue_tile_m).to(input_tensor.device)]
