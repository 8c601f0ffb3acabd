//! Why a connection does not use RDMA: in words for people, and by a code for metrics. Both are made together,
//! and travel together to the peer.

use std::fmt;
use std::sync::Arc;

use crate::error::RdmaError;
use tonic_rdma_verbs::{VerbsError, VerbsErrorKind};

macro_rules! reason_codes {
    ($($(#[doc = $doc:literal])+ $name:ident => $label:literal;)+) => {
        /// The cause why a connection does not use RDMA, as a short code: the label `reason` of the metrics
        /// `tonic_rdma_negotiations_total` and `tonic_rdma_negotiations_failed_total`.
        /// [`RdmaConnectInfo::reason`](crate::RdmaConnectInfo::reason) has the words.
        ///
        /// ```
        /// use tonic_rdma::{RdmaConnectInfo, ReasonCode};
        ///
        /// fn is_intended(info: &RdmaConnectInfo) -> bool {
        ///     matches!(info.reason_code(), None | Some(ReasonCode::Policy))
        /// }
        /// assert_eq!(ReasonCode::OtherHost.to_string(), "other_host");
        /// # let _ = is_intended;
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ReasonCode {
            $($(#[doc = $doc])+ $name,)+
        }

        impl ReasonCode {
            /// All codes.
            pub(crate) const ALL: &[Self] = &[$(Self::$name,)+];

            /// Returns the label.
            pub(crate) const fn label(self) -> &'static str {
                match self {
                    $(Self::$name => $label,)+
                }
            }
        }
    };
}

reason_codes! {
    /// The policy of this side, or of the server, is tcp-only.
    Policy => "policy";
    /// The client is a stock client, or speaks as one.
    StockClient => "stock_client";
    /// The server does not understand the hello: a stock server, or a proxy before it.
    StockServer => "stock_server";
    /// One side has no usable RDMA device.
    NoDevice => "no_device";
    /// The two sides are set to different providers.
    NoCommonDevice => "no_common_device";
    /// The software device reaches one host only, and the peer is on another.
    OtherHost => "other_host";
    /// The peer is in another network namespace, and no directory is shared.
    OtherNetworkNamespace => "other_network_namespace";
    /// The peer runs as another user, and one side does not let it in.
    UntrustedPeer => "untrusted_peer";
    /// Both sides have a device, and the one does not reach the other.
    Unreachable => "unreachable";
    /// The memory budget of one side is used up, or the system has no memory.
    MemoryBudget => "memory_budget";
    /// The process has no file descriptors left.
    Descriptors => "descriptors";
    /// One side has no room: too many unfinished negotiations or connections, or a device that takes too long.
    Busy => "busy";
    /// The peer did not answer in time.
    Silent => "silent";
    /// The peer closed the connection during the negotiation.
    Closed => "closed";
    /// The two sides speak no common version of the protocol.
    Version => "version";
    /// The peer broke the rules of the negotiation.
    Protocol => "protocol";
    /// A device failed, or refused a request.
    DeviceFailed => "device_failed";
    /// The client speaks neither gRPC nor the protocol of this crate. Such a connection is refused.
    NotGrpc => "not_grpc";
    /// Another cause, or one that this version does not know.
    Other => "other";
}

impl ReasonCode {
    /// Returns the code of an error of a device.
    pub(super) fn of_device(error: &VerbsError) -> Self {
        use rustix::io::Errno;
        let errno = error.system().and_then(Errno::from_io_error);
        match error.kind() {
            VerbsErrorKind::NoMemory | VerbsErrorKind::QuotaExhausted | VerbsErrorKind::TooLarge => {
                ReasonCode::MemoryBudget
            }
            VerbsErrorKind::System => match errno {
                Some(Errno::MFILE | Errno::NFILE) => ReasonCode::Descriptors,
                Some(Errno::NOMEM) => ReasonCode::MemoryBudget,
                _ => ReasonCode::DeviceFailed,
            },
            VerbsErrorKind::NoDevice | VerbsErrorKind::Unusable | VerbsErrorKind::Unsupported => {
                ReasonCode::NoDevice
            }
            VerbsErrorKind::Unreachable => ReasonCode::Unreachable,
            VerbsErrorKind::NotAdmitted => ReasonCode::UntrustedPeer,
            VerbsErrorKind::InvalidAddress => ReasonCode::Protocol,
            _ => ReasonCode::DeviceFailed,
        }
    }
}

impl fmt::Display for ReasonCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// The reason why a connection does not use RDMA: people read the words, which the peer gets, too.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct RdmaUnavailable {
    pub(super) code: ReasonCode,
    text: Arc<str>,
}

impl RdmaUnavailable {
    pub(super) fn new(code: ReasonCode, text: impl ToString) -> Self {
        Self { code, text: text.to_string().into() }
    }

    /// Makes the reason of something that should not happen.
    pub(crate) fn other(text: impl ToString) -> Self {
        Self::new(ReasonCode::Other, text)
    }

    /// Returns the reason as the peer gets it: the code in brackets, then the words. A peer of an earlier
    /// version shows both.
    pub(super) fn for_peer(&self) -> String {
        format!("[{}] {}", self.code, self.text)
    }

    /// Reads what the peer gave as its reason. `said` goes before its words.
    pub(super) fn of_peer(said: &str, reason: &str) -> Self {
        // Words of an earlier version may begin with a bracket.
        let is_label = |label: &str| label.bytes().all(|byte| byte == b'_' || byte.is_ascii_lowercase());
        let tagged = reason.strip_prefix('[').and_then(|rest| rest.split_once("] "));
        let tagged = tagged.filter(|(label, _)| is_label(label));
        let code = |label| ReasonCode::ALL.iter().find(|code| code.label() == label);
        match tagged {
            Some((label, text)) => {
                let code = code(label).copied().unwrap_or(ReasonCode::Other);
                Self::new(code, format!("{said}: {text}"))
            }
            None => Self::other(format!("{said}: {reason}")),
        }
    }
}

impl From<VerbsError> for RdmaUnavailable {
    fn from(error: VerbsError) -> Self {
        Self::new(ReasonCode::of_device(&error), error)
    }
}

impl From<RdmaError> for RdmaUnavailable {
    fn from(error: RdmaError) -> Self {
        let code = error.converted_from().map_or(ReasonCode::NoDevice, ReasonCode::of_device);
        Self::new(code, error)
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::error::RdmaErrorKind;

    #[test]
    fn a_code_travels_with_its_words() {
        for code in ReasonCode::ALL {
            let ours = RdmaUnavailable::new(*code, "no RDMA: [see] there");
            let theirs = RdmaUnavailable::of_peer("the server declined", &ours.for_peer());
            assert_eq!(theirs.code, *code);
            assert_eq!(theirs.to_string(), "the server declined: no RDMA: [see] there");
        }
        // Of an earlier version, and of a later one.
        let same = ["no RDMA", "[::1] left", "[", ""].map(|said| (said, said));
        for (said, text) in same.into_iter().chain([("[new_code] no RDMA", "no RDMA")]) {
            let theirs = RdmaUnavailable::of_peer("the peer can't", said);
            assert_eq!(
                (theirs.code, theirs.to_string()),
                (ReasonCode::Other, format!("the peer can't: {text}"))
            );
        }
    }

    #[test]
    fn labels_are_distinct_and_in_snake_case() {
        let labels: std::collections::BTreeSet<_> = ReasonCode::ALL.iter().map(|code| code.label()).collect();
        assert_eq!(labels.len(), ReasonCode::ALL.len());
        let is_snake = |label: &&str| label.bytes().all(|byte| byte == b'_' || byte.is_ascii_lowercase());
        assert!(labels.iter().all(is_snake) && !labels.contains("none"), "{labels:?}");
    }

    #[test]
    fn errors_of_the_device_keep_their_cause() {
        let os = |number| VerbsError::os("opening", io::Error::from_raw_os_error(number));
        let of_kind = |kind| VerbsError::new(kind, "why");
        for (error, code) in [
            (os(rustix::io::Errno::MFILE.raw_os_error()), ReasonCode::Descriptors),
            (os(rustix::io::Errno::NFILE.raw_os_error()), ReasonCode::Descriptors),
            (os(rustix::io::Errno::NOMEM.raw_os_error()), ReasonCode::MemoryBudget),
            (os(rustix::io::Errno::IO.raw_os_error()), ReasonCode::DeviceFailed),
            (of_kind(VerbsErrorKind::NoMemory), ReasonCode::MemoryBudget),
            (of_kind(VerbsErrorKind::NoDevice), ReasonCode::NoDevice),
            (of_kind(VerbsErrorKind::Unreachable), ReasonCode::Unreachable),
            (of_kind(VerbsErrorKind::NotAdmitted), ReasonCode::UntrustedPeer),
        ] {
            assert_eq!(RdmaUnavailable::from(error.clone()).code, code, "{error}");
            let wrapped = RdmaError::of(RdmaErrorKind::Device, error);
            assert_eq!(RdmaUnavailable::from(wrapped.clone()).code, code, "{wrapped}");
        }
    }
}
