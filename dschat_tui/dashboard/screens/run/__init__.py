"""The run screen: one file per tab, the model they all show, and the screen that composes them."""
