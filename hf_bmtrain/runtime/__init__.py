"""This process: what the launcher says, the world, and the schedule of what is open in a step."""
