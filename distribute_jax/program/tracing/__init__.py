"""One trace of the step, as one replica sees it."""
