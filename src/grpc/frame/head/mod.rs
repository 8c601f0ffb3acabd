//! The compact form of heads and trailers.
//!
//! Each direction of a connection has a table of paths, authorities, names, and names with values. The encoder adds entries until the
//! table is full, and never removes one; the decoder follows. A head is a sequence of instructions:
//!
//! | instruction | followed by | meaning |
//! |---|---|---|
//! | 0 | entry (2) | the entry: a path, an authority, or a name with its value |
//! | 1, 2 | length (2), bytes | a path; 2 adds it to the table |
//! | 3, 4 | length (2), bytes | an authority; 4 adds it to the table |
//! | 5, 6 | length (2), name, length (4), value | a name with its value; 6 adds the name to the table |
//! | 7, 8 | entry of a name (2), length (4), value | a name with its value; 8 adds both to the table |
//!
//! 128 is added to 5, 6 and 7 if the value is sensitive. Such values do not enter the table.
//!
//! A name enters the table when it is used first, a value when it is used twice in succession. So values that are different in each
//! call do not fill the table.

mod decoder;
mod encoder;

use http::HeaderMap;
use http::uri::{Authority, PathAndQuery};

pub(in crate::grpc) use self::decoder::Decoder;
pub(in crate::grpc) use self::encoder::Encoder;

/// The head of a request. The method is always POST and the scheme `http`, because gRPC uses no others here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestHead {
    /// The path: `/package.Service/Method`.
    pub(crate) path: PathAndQuery,
    pub(crate) authority: Option<Authority>,
    /// The metadata, with gRPC's own fields such as `te`, `content-type` and `grpc-timeout`.
    pub(crate) headers: HeaderMap,
}

/// The bytes that a field counts beside its name and value (RFC 9113, 6.5.2).
const FIELD: usize = 32;

/// The instructions.
mod op {
    pub(super) const ENTRY: u8 = 0;
    pub(super) const PATH: u8 = 1;
    pub(super) const NEW_PATH: u8 = 2;
    pub(super) const AUTHORITY: u8 = 3;
    pub(super) const NEW_AUTHORITY: u8 = 4;
    pub(super) const FIELD: u8 = 5;
    pub(super) const FIELD_NEW_NAME: u8 = 6;
    pub(super) const FIELD_OF_NAME: u8 = 7;
    pub(super) const NEW_FIELD: u8 = 8;
    pub(super) const SENSITIVE: u8 = 0x80;
}

/// Returns how much fields count.
pub(in crate::grpc) fn fields_length(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + FIELD).sum()
}

impl RequestHead {
    /// Returns how much the head counts.
    pub(in crate::grpc) fn counted_length(&self) -> usize {
        let authority = self.authority.as_ref().map_or(0, |authority| authority.as_str().len() + FIELD);
        self.path.as_str().len() + FIELD + authority + fields_length(&self.headers)
    }
}
