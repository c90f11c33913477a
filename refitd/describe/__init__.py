"""What lives where: tensors described as tiles of canonical tensors. Pure; only module.py knows torch."""
