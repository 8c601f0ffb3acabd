//! Runs the cases of one combination: starts servers, bridges and clients, and reads what the clients print.

mod bridge;
pub(crate) mod combination;
pub(crate) mod process;
