//! Features of tonic besides plain calls. Each scenario runs over stock tonic's TCP first, and must have the same outcome over
//! RDMA, and over TCP where two of our ends fell back to it.

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
