"""The grammar of training.log: what is written, how any log is read, why a step failed."""
