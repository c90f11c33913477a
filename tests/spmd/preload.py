"""What the fork server imports once for all processes of a pool."""

import refitd.adapters.uneven_dtensor
import refitd.copy_services.gloo
import refitd.inprocess.refit  # noqa: F401
