"""Entry point of `python -m refitd.worker`."""

from refitd.service import end
from refitd.worker.main import main

end(main())
