//! The setting `--encode`: how a message with a payload is encoded. The client encodes requests, and the server encodes
//! replies if payloads go down.

use std::fmt;

use clap::ValueEnum;
use serde::Serialize;
use tonic::body::Body;
use tonic::codegen::http::Request;
use tonic_rdma::gather::{self, GatherRequests};

use super::calls::CallChannel;

/// Whether payloads are copied when messages are encoded, in modes without an encoding of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Encode {
    /// Payloads are copied into one buffer, as all generated code does.
    #[default]
    Copy,
    /// Payloads go by reference, with [`gather`], in all modes.
    Gather,
}

impl Encode {
    /// Returns the name on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Gather => "gather",
        }
    }

    /// Wraps `channel` so that its requests are encoded this way.
    pub(crate) fn wrap(self, channel: CallChannel) -> GatherRequests<CallChannel> {
        match self {
            Self::Gather => gather::requests(channel),
            Self::Copy => GatherRequests::new(channel, unchanged as fn(Request<Body>) -> Request<Body>),
        }
    }
}

fn unchanged(request: Request<Body>) -> Request<Body> {
    request
}

impl fmt::Display for Encode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Copy => "messages are encoded into one buffer, as generated code does",
            Self::Gather => "payloads go by reference (tonic_rdma::gather), in all modes",
        })
    }
}
