"""How large the results are of the torch operations that a block of code runs."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """`with Operations() as ran: ...` leaves in `ran` the entries of the largest result, and of that in float32."""

    largest = largest_float32 = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, torch.Tensor):
                entries = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.largest = max(self.largest, entries)
                if tensor.dtype == torch.float32:
                    self.largest_float32 = max(self.largest_float32, entries)
        return result
