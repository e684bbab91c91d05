"""Matrix products: one kernel, its schedules, and the projections that are made of it."""
