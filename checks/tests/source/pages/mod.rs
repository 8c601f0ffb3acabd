//! Checks the lists, links and quotations of README and the book. The pages' code runs as doc tests.

mod figures;
mod links;
mod messages;
mod metrics;
mod variables;
mod words;
