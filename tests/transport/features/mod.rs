//! Features of tonic besides plain calls. Each scenario runs over stock tonic's TCP first. Its outcome must
//! be equal over RDMA, and over TCP after a fallback between two of our ends.

mod balance;
mod compression;
mod health;
mod interceptors;
mod keepalive;
mod layers;
mod limits;
mod membership;
mod metadata;
mod reconnect;
mod reflection;
mod shutdown;
mod sizes;
mod timeouts;
mod web;
