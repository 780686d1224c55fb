"""`python -m gerl.vote [experiment=NAME] [key=value ...]`: people vote on a run's images while it trains."""

from gerl.commandline import signals
from gerl.commandline.command import start

if __name__ == "__main__":
    signals.exit_with(start("reward_models.votes.command"))
