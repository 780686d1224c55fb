"""gerl in Python: `gerl.train`, `gerl.Trainer`, `gerl.Run`, for notebooks and programs."""
