"""What low precision does to a model: measured, predicted, and what to keep in fp32."""
