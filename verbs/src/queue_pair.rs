//! Reliable connected queue pairs.

use std::any::Any;
use std::fmt::{self, Debug};

use super::{Access, PostError, QueuePairState, ReceiveRequest, SendRequest, VerbsError};

/// A reliable connected (RC) queue pair (`struct ibv_qp`). Destroyed when the last reference goes; outstanding
/// requests are then gone without a completion.
///
/// Requests on the send queue run and complete in the order of posting; an RDMA READ may be overtaken in its
/// execution by later sends and writes, never in its completion.
pub trait QueuePair: Any + Send + Sync + Debug {
    /// Returns the number that completions carry; unique within the device.
    fn number(&self) -> QueuePairNumber;

    /// Returns the state.
    fn state(&self) -> QueuePairState;

    /// Returns why it is in Error, for people; `None` if it is not, or if [`to_error`](Self::to_error) took it there. The first
    /// reason stays.
    fn failure(&self) -> Option<String> {
        None
    }

    /// Returns the capacity that it was created with.
    fn capacity(&self) -> &QueuePairCapacity;

    /// Returns what the peer has to know to connect, for [`to_rtr`](Self::to_rtr) on its side. Valid from Init on.
    fn local_address(&self) -> QueuePairAddress;

    /// Moves from Reset to Init. `access` limits what the peer may do through this queue pair, whatever regions grant.
    fn to_init(&self, access: Access) -> Result<(), VerbsError>;

    /// Moves from Init to Rtr (ready to receive), connected to `peer`. It may take a moment, never longer than a second.
    fn to_rtr(&self, peer: &QueuePairAddress, settings: &PathSettings) -> Result<(), VerbsError>;

    /// Moves from Rtr to Rts (ready to send).
    fn to_rts(&self, settings: &PathSettings) -> Result<(), VerbsError>;

    /// Moves from any state to Error: outstanding requests complete as flushed.
    fn to_error(&self);

    /// Posts requests in order.
    fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError>;

    /// Posts receives in order. Allowed in Error, where they complete as flushed.
    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError>;

    /// Returns evidence that both sides see one another's memory.
    fn probe(&self) -> Probe;

    /// Returns whether the end of what arrives shows that all before it has arrived, without a completion: of what peers WRITE
    /// to this side through this queue pair, and of what its own READs bring (man 3 ibv_query_qp_data_in_order).
    ///
    /// If it does: a thread that finds the last 8 bytes of a WRITE, or of a READ's last segment, changed to the new value finds all
    /// other bytes of that request in place, and those of every WRITE before it on the same queue pair, provided that these 8 bytes
    /// are at an address that is a multiple of 8, and are loaded at once, with acquire semantics
    /// ([`HostMemory::load_u64`](super::HostMemory::load_u64)). In what order other bytes come is open. The new value must differ
    /// from whatever may have been there before: an epoch, not a flag.
    fn places_in_order(&self) -> bool {
        false
    }
}

/// Evidence for a device that works by shared memory: a nonce of our own, and what we read at the place where the
/// peer keeps its own. Each side tells the other what it read, over another way; only if both match do they share
/// memory. `None` on a device that needs no such proof.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// Written to our own memory before the peer connected.
    pub ours: Option<u64>,
    /// Read from the peer's memory, from Rtr on.
    pub peers: Option<u64>,
}

/// Number of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueuePairNumber(pub u32);

impl fmt::Display for QueuePairNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// What a queue pair is created for (`struct ibv_qp_cap`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuePairCapacity {
    /// Requests outstanding on the send queue.
    pub send_requests: u32,
    /// Requests outstanding on the receive queue.
    pub receive_requests: u32,
    /// Segments of a send request.
    pub send_segments: u32,
    /// Segments of a receive request.
    pub receive_segments: u32,
    /// Inline bytes of a send request.
    pub inline: u32,
}

/// Attributes of the connection (`struct ibv_qp_attr`); names as in the environment variables of `Config`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathSettings {
    /// RDMA READs outstanding as initiator, and as target.
    pub outstanding_reads: u8,
    /// How often a send is tried again while the peer has no receive posted, 0–7; 7 means without end.
    pub rnr_retry: u8,
    /// What a peer waits before it tries again, as the 5-bit code of IBA vol. 1, table 45 (1 = 0.01 ms, 0 = 655.36 ms).
    pub min_rnr_timer: u8,
    /// Transport timeout: 4.096 µs × 2^`timeout`, 0–31.
    pub timeout: u8,
    /// Transport retries, 0–7.
    pub retry_count: u8,
    /// Service level, 0–15.
    pub service_level: u8,
    /// Traffic class, 0–255.
    pub traffic_class: u8,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// Path MTU in bytes, 256–4096; `None` takes the port's.
    pub mtu: Option<u16>,
}

impl Default for PathSettings {
    fn default() -> Self {
        Self {
            outstanding_reads: 16,
            rnr_retry: 7,
            min_rnr_timer: 1,
            timeout: 14,
            retry_count: 7,
            service_level: 0,
            traffic_class: 0,
            pkey_index: 0,
            mtu: None,
        }
    }
}

/// What a peer needs to connect to a queue pair, opaque to all but the provider that made it; at most
/// [`MAX_LENGTH`](Self::MAX_LENGTH) bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuePairAddress(Box<[u8]>);

impl QueuePairAddress {
    /// Longest address, in bytes.
    pub const MAX_LENGTH: usize = 256;

    /// Makes an address of its bytes; `None` if there are too many.
    ///
    /// ```
    /// use tonic_rdma_verbs::QueuePairAddress;
    ///
    /// let received = [1, 2, 3]; // from the peer
    /// let address = QueuePairAddress::new(received).expect("not too long");
    /// assert_eq!(address.as_bytes(), received);
    /// ```
    pub fn new(bytes: impl Into<Box<[u8]>>) -> Option<Self> {
        let bytes = bytes.into();
        (bytes.len() <= Self::MAX_LENGTH).then_some(Self(bytes))
    }

    /// Returns the bytes, for the hello.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}
