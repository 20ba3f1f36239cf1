"""The paper's tables and figures beside what a plan says of them."""
