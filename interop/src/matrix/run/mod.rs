//! Runs the cases of one combination: starts servers, bridges and clients, and reads the output of the clients.

mod bridge;
pub(crate) mod combination;
pub(crate) mod process;
