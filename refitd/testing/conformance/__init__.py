"""The conformance suite of copy services, for refitd's own backends and for other packages.

    pytest --pyargs refitd.testing.conformance -k NAME

It tests every installed backend that can run here, in real processes, with each kind of memory that it declares, and
needs pytest and hypothesis. `-k` chooses one backend by its name. examples/copy_service shows a package that uses it.
"""
