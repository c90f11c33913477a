"""Random fleets that live through random operations; every byte is compared after each of them."""
