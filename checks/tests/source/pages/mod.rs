//! Checks the lists, links and quotations of README and the book. The pages' code runs as doc tests.

mod alerts;
mod figures;
mod links;
mod messages;
mod metrics;
mod runbook;
mod variables;
mod words;
