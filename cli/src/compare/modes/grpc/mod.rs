//! The gRPC modes: the client, its connections, and the services of the server process.

pub(crate) mod client;
pub(crate) mod connect;
mod keep_awake;
mod registered;
mod sample;
pub(crate) mod service;
pub(crate) mod source;
#[cfg(test)]
mod tests;
