"""Entry points of the steps: `deepspeed --module engine.steps.NAME --config FILE --output RUN`."""
