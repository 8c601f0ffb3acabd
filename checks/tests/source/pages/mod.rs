//! Checks the lists, the links and the code of README and the book, without running the code.

mod links;
mod messages;
mod metrics;

mod variables;
