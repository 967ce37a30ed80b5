"""The event log: what the app records and what the learner folds over."""
