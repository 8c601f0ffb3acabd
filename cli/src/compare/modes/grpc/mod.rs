//! The gRPC modes: the client, its connections, and the services of the server process.

pub(crate) mod client;
pub(crate) mod reference;
pub(crate) mod service;
#[cfg(test)]
mod tests;
