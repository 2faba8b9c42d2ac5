"""A thin door to the conversation: `python chatbot.py --path DIR` is `dschat chat --path DIR`."""

import sys

from dschat_tui.cli.main import app

if __name__ == "__main__":
    app(["chat", *sys.argv[1:]])
