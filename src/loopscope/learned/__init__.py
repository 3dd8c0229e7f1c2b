"""Which readouts were learned? Gates fitted to states, and stoppers fitted to all signals of a recording."""
