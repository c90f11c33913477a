"""What other frameworks keep tensors in, brought to the form that refitd describes."""
