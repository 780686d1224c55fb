"""A person as the reward: the vote service with its page, and the run that learns while people vote."""
