"""Names of one framework's tensors in another's, for `names=` of registrations: Megatron-Core to Hugging Face."""

from refitd.describe.renames import Fused as Fused
from refitd.describe.renames import Names as Names
from refitd.describe.renames import Padded as Padded
from refitd.describe.renames import Part as Part
from refitd.names.megatron import megatron_to_hf as megatron_to_hf

__all__ = ["Fused", "Names", "Padded", "Part", "megatron_to_hf"]
