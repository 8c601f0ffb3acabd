//! The modes that `compare` can compare.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tonic_rdma_commands::{Flavour, Named};

use crate::measure::settings::{Consume, Http2};
use crate::measure::transport::Encode;

/// A mode: one way to carry the same bytes. `compare --list-modes` shows the texts below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    /// tonic over TCP, with which all other modes are compared.
    GrpcTcp,
    /// grpc-tcp in a runtime that never sleeps, on both sides: TCP without its wake-ups.
    GrpcTcpBusy,
    /// grpc-tcp with the windows and frames of --http2 tuned, whatever the other modes have.
    GrpcTcpTuned,
    /// grpc-tcp to the port that also offers RDMA: what that listener costs a client that knows nothing of it.
    GrpcTcpShared,
    /// tonic over a Unix socket.
    GrpcUds,
    /// the generated code of grpc-tcp over RDMA: HTTP/2 over another stream.
    GrpcRdma,
    /// grpc-rdma with payloads by reference (tonic_rdma::gather).
    GrpcRdmaGather,
    /// generated code as it is over native calls: RDMA without HTTP/2.
    GrpcNative,
    /// native calls with payloads by reference on both sides, sent from registered memory.
    GrpcNativeGather,
    /// a native call carries a handle, and its receiver fetches the payload from the client's registered memory.
    GrpcReference,
    /// grpc-reference with calls and fetches over TCP.
    GrpcReferenceTcp,
    /// a tensor without RPC, written to the memory where the receiver expects it, from a copy in registered memory.
    // RDMA.cp of Xue et al., "Fast Distributed Deep Learning over RDMA" (EuroSys 2019).
    RdmaCp,
    /// rdma-cp without that copy, because the tensor is in registered memory; both sides poll.
    // RDMA.zerocp of the same paper.
    RdmaZerocp,
    /// rdma-zerocp, but both sides wait by futures, as an ordinary service does.
    RdmaZerocpAwait,
    /// rdma-zerocp without memory in which the receiver expects it: the receiver learns shape and place, and reads it.
    // Dynamic allocation of the same paper (§3.3).
    RdmaDynamic,
    /// rdma-zerocp by names: the receiver asks for a tensor and a step, and the sender writes what it offers so named.
    // The rendezvous of TensorFlow's grpc+verbs.
    RdmaNamed,
    /// no transport: a copy within the client, as the limit of the machine's memory.
    Memcpy,
}

/// The largest payload of a gRPC call: with it the message stays below 2 GiB, the limit of protobuf
/// implementations.
const GRPC_LIMIT: u64 = 2047 << 20;

impl Mode {
    /// The modes of `parameter-server`.
    pub(crate) const TRAINING: [Self; 7] = [
        Self::GrpcTcp,
        Self::GrpcRdma,
        Self::GrpcRdmaGather,
        Self::GrpcNative,
        Self::GrpcNativeGather,
        Self::RdmaCp,
        Self::RdmaZerocp,
    ];

    /// Returns the name on the command line and in the JSON.
    pub(crate) fn name(self) -> &'static str {
        Named::name(&self)
    }

    /// Returns what the mode is, in a sentence without its full stop.
    pub(crate) fn meaning(self) -> String {
        let value = self.to_possible_value();
        value.as_ref().and_then(|value| value.get_help()).map(ToString::to_string).unwrap_or_default()
    }

    /// Returns all modes, in the order of the table.
    pub(crate) fn all() -> &'static [Self] {
        Self::value_variants()
    }

    /// Returns the modes that are compared by default: all that carry bytes, as far as `runtime` can run
    /// them. A program that chooses nothing has neither a runtime that never sleeps nor tuned windows, so the
    /// list of --defaults lacks both.
    pub(crate) fn default_list(defaults: bool, runtime: Flavour) -> Vec<Self> {
        let is_in = |mode: &Self| match mode {
            Self::Memcpy | Self::GrpcTcpShared | Self::GrpcReferenceTcp => false,
            Self::RdmaDynamic | Self::RdmaNamed => false,
            Self::GrpcTcpBusy => !defaults && mode.is_for(runtime),
            Self::GrpcTcpTuned => !defaults,
            _ => true,
        };
        Self::all().iter().copied().filter(is_in).collect()
    }

    /// Returns whether the mode needs an RDMA device, at the server at least.
    pub(crate) const fn uses_rdma(self) -> bool {
        !matches!(
            self,
            Self::GrpcTcp
                | Self::GrpcTcpBusy
                | Self::GrpcTcpTuned
                | Self::GrpcUds
                | Self::GrpcReferenceTcp
                | Self::Memcpy
        )
    }

    /// Returns whether the receiver gets a tensor to compute with, and no message.
    pub(crate) const fn carries_tensors(self) -> bool {
        matches!(self, Self::RdmaCp | Self::RdmaZerocp | Self::RdmaZerocpAwait) || self.is_passed()
    }

    /// Returns whether tensors have no place at the receiver beforehand.
    pub(crate) const fn is_passed(self) -> bool {
        matches!(self, Self::RdmaDynamic | Self::RdmaNamed)
    }

    /// Returns whether the mode's calls go over HTTP/2, whose settings the command line has.
    pub(crate) const fn uses_http2(self) -> bool {
        match self {
            Self::GrpcTcpTuned | Self::GrpcNative | Self::GrpcNativeGather | Self::GrpcReference => false,
            mode => mode.is_grpc(),
        }
    }

    /// Returns the encoding of the mode's messages. `setting` comes from the command line.
    pub(crate) const fn encoding(self, setting: Encode) -> Encode {
        match self {
            Self::GrpcRdmaGather => Encode::Gather,
            // Its channel sends by reference.
            Self::GrpcNativeGather | Self::GrpcReference => Encode::Copy,
            _ => setting,
        }
    }

    /// Returns whether a gRPC mode sends payloads from registered memory.
    pub(crate) const fn registers_payloads(self) -> bool {
        matches!(self, Self::GrpcNativeGather)
    }

    /// Returns whether calls carry handles, and receivers fetch the payloads.
    pub(crate) const fn is_by_reference(self) -> bool {
        matches!(self, Self::GrpcReference | Self::GrpcReferenceTcp)
    }

    /// Returns whether the mode is for processes of one host: a Unix socket is, and receivers by reference
    /// connect to no other host.
    pub(crate) const fn is_of_one_host(self) -> bool {
        matches!(self, Self::GrpcUds) || self.is_by_reference()
    }

    /// Returns whether the receiver consumes payloads in this mode.
    pub(crate) const fn reduces(self, consume: Consume) -> bool {
        match consume {
            Consume::Auto => self.carries_tensors(),
            Consume::ReduceMax => true,
            Consume::None => false,
        }
    }

    /// Returns whether the mode makes gRPC calls over a connection.
    pub(crate) const fn is_grpc(self) -> bool {
        !self.carries_tensors() && !matches!(self, Self::Memcpy)
    }

    /// Returns whether both sides poll for arrivals without ever sleeping, in a mode that sleeps otherwise.
    pub(crate) const fn never_sleeps(self) -> bool {
        matches!(self, Self::GrpcTcpBusy)
    }

    /// Returns whether `runtime` can run the mode. A multi-thread runtime can't keep all of its threads
    /// awake.
    pub(crate) const fn is_for(self, runtime: Flavour) -> bool {
        runtime.is_one_thread() || !self.never_sleeps()
    }

    /// Returns whether tensors are sent from registered memory, without a copy.
    pub(crate) const fn sends_in_place(self) -> bool {
        matches!(self, Self::RdmaZerocp | Self::RdmaZerocpAwait) || self.is_passed()
    }

    /// Returns whether both sides wait for tensors by futures, without polling.
    pub(crate) const fn awaits(self) -> bool {
        matches!(self, Self::RdmaZerocpAwait)
    }

    /// Returns the largest message in bytes and the reason of this limit, or `None` where only the machine's
    /// memory limits messages.
    pub(crate) fn limit(self) -> Option<(u64, &'static str)> {
        self.is_grpc().then_some((GRPC_LIMIT, "a protobuf message ends below 2 GiB"))
    }
}

tonic_rdma_commands::displayed_by_name!(Mode);

/// What a run measures: a mode, with one of the HTTP/2 settings if the run has several and the mode uses HTTP/2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Contender {
    pub(crate) mode: Mode,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) http2: Option<Http2>,
}

impl Contender {
    /// Returns what a run of `modes` with these `settings` measures. The settings of a mode follow one another.
    pub(crate) fn all(modes: &[Mode], settings: &[Http2]) -> Vec<Self> {
        let of = |mode: &Mode| {
            let several = settings.iter().filter(|_| settings.len() > 1 && mode.uses_http2());
            let each: Vec<_> = several.map(|http2| Self { mode: *mode, http2: Some(*http2) }).collect();
            if each.is_empty() { vec![Self::from(*mode)] } else { each }
        };
        modes.iter().flat_map(of).collect()
    }

    /// Returns whether this one is compared with `base`: not if both have settings and these differ. Without a
    /// setting it is compared with the first of the run.
    pub(crate) fn is_against(self, base: Self) -> bool {
        self.http2.is_none() || base.http2.is_none() || self.http2 == base.http2
    }
}

impl From<Mode> for Contender {
    fn from(mode: Mode) -> Self {
        Self { mode, http2: None }
    }
}

/// `grpc-tcp`, or `grpc-tcp (tuned)`.
impl fmt::Display for Contender {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.http2 {
            None => write!(formatter, "{}", self.mode),
            Some(http2) => write!(formatter, "{} ({})", self.mode, http2.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_read_back() {
        for mode in Mode::all() {
            assert_eq!(Mode::from_str(mode.name(), false), Ok(*mode));
            assert_eq!(serde_json::to_value(mode).unwrap(), mode.name());
            assert!(mode.meaning().len() > 20 && !mode.meaning().contains(['\n', '`']), "{mode}");
        }
        assert!(Mode::from_str("grpc", false).is_err());
    }

    #[test]
    fn memcpy_the_shared_port_references_over_tcp_and_passed_tensors_are_measured_only_on_request() {
        let usual = Mode::default_list(false, Flavour::IdlePolling);
        assert_eq!(usual.len(), Mode::all().len() - 5);
        let on_request = [Mode::Memcpy, Mode::GrpcTcpShared, Mode::GrpcReferenceTcp];
        for mode in on_request.into_iter().chain([Mode::RdmaDynamic, Mode::RdmaNamed]) {
            assert!(!usual.contains(&mode));
        }
        let defaults = Mode::default_list(true, Flavour::CurrentThread);
        assert_eq!((defaults[0], defaults[1], defaults.len()), (Mode::GrpcTcp, Mode::GrpcUds, 10));
    }

    #[test]
    fn modes_that_never_sleep_need_a_runtime_of_one_thread() {
        let several = Flavour::MultiThread(2);
        assert!(!Mode::default_list(false, several).contains(&Mode::GrpcTcpBusy));
        assert_eq!(Mode::default_list(false, several).len(), 11);
        assert!(Mode::default_list(false, Flavour::CurrentThread).contains(&Mode::GrpcTcpBusy));
    }

    #[test]
    fn modes_over_http2_are_measured_with_each_setting() {
        let modes = [Mode::GrpcTcp, Mode::GrpcNative, Mode::GrpcRdma, Mode::GrpcTcpTuned, Mode::RdmaCp];
        let [usual, tuned] = [Http2::DEFAULT, Http2::TUNED];
        let named = |settings: &[Http2]| {
            Contender::all(&modes, settings).iter().map(Contender::to_string).collect::<Vec<_>>().join(", ")
        };
        let both = "grpc-tcp (default), grpc-tcp (tuned), grpc-native, grpc-rdma (default), grpc-rdma (tuned), grpc-tcp-tuned, \
                    rdma-cp";
        assert_eq!(named(&[usual, tuned]), both);
        assert_eq!(named(&[tuned]), "grpc-tcp, grpc-native, grpc-rdma, grpc-tcp-tuned, rdma-cp");
        let [tcp, tcp_tuned, native, ..] = Contender::all(&modes, &[usual, tuned])[..] else {
            unreachable!()
        };
        assert!(native.is_against(tcp) && tcp.is_against(tcp) && !tcp_tuned.is_against(tcp));
        let json = serde_json::json!({ "mode": "grpc-tcp", "http2": "tuned" });
        assert_eq!(serde_json::to_value(tcp_tuned).ok().as_ref(), Some(&json));
        assert_eq!(serde_json::from_value(json).ok(), Some(tcp_tuned));
    }

    #[test]
    fn by_default_only_modes_that_carry_tensors_consume_payloads() {
        for mode in Mode::all() {
            assert_eq!(mode.reduces(Consume::Auto), mode.carries_tensors(), "{mode}");
            assert!(mode.reduces(Consume::ReduceMax) && !mode.reduces(Consume::None));
        }
        assert!(!Mode::GrpcTcp.reduces(Consume::Auto) && !Mode::Memcpy.reduces(Consume::Auto));
    }
}
