"""Other frameworks, over what `refitd` exports and nothing else of it."""
