//! Settings of all modes: HTTP/2 windows and frames, and the use of a payload by its receiver.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tonic::transport::{Endpoint, Server};
use tonic_rdma_commands::units::{self, parse_size};
use tonic_rdma_commands::{List, ValueError, parse_set};

/// Window and frame sizes, without which tonic's defaults hold. The JSON has the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct Http2(pub(crate) Option<Http2Sizes>);

/// HTTP/2 settings of both sides, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Http2Sizes {
    stream_window: u32,
    connection_window: u32,
    max_frame: u32,
}

/// The largest number of settings of a run: the server listens with each of them.
const MOST_SETTINGS: usize = 8;

/// The largest window (RFC 9113, section 6.9.1).
const MAX_WINDOW: u64 = (1 << 31) - 1;

/// The smallest and the largest SETTINGS_MAX_FRAME_SIZE (RFC 9113, section 6.5.2).
const FRAME_SIZES: std::ops::RangeInclusive<u64> = (1 << 14)..=(1 << 24) - 1;

impl Http2 {
    /// tonic's defaults.
    pub(crate) const DEFAULT: Self = Self(None);

    /// The sizes that were found best for `grpc-tcp`, by measuring it at 64 KiB to 64 MiB with windows from 2 to 64 MiB
    /// and frames from 16 KiB to 1 MiB (`--modes grpc-tcp --http2 STREAM/CONNECTION/FRAME`): frames of 512 KiB
    /// carried most from 1 MiB on, and larger windows carried no more.
    pub(crate) const TUNED: Self =
        Self(Some(Http2Sizes { stream_window: 16 << 20, connection_window: 32 << 20, max_frame: 512 << 10 }));

    /// Parses `default`, `tuned`, or `STREAM/CONNECTION/FRAME` sizes.
    pub(crate) fn parse(text: &str) -> Result<Self, ValueError> {
        match text {
            "default" => return Ok(Self::DEFAULT),
            "tuned" => return Ok(Self::TUNED),
            _ => {}
        }
        let accepted = "default, tuned, or STREAM/CONNECTION/FRAME sizes such as 16MiB/32MiB/256KiB";
        let sizes: Option<Vec<u64>> = text.split('/').map(|part| parse_size(part).ok()).collect();
        let Some([stream, connection, frame]) = sizes.as_deref() else {
            return Err(ValueError::unknown(accepted));
        };
        let window = |bytes: u64| u32::try_from(bytes).ok().filter(|_| (1..=MAX_WINDOW).contains(&bytes));
        let frame = u32::try_from(*frame).ok().filter(|_| FRAME_SIZES.contains(frame));
        match (window(*stream), window(*connection), frame) {
            (Some(stream_window), Some(connection_window), Some(max_frame)) => {
                Ok(Self(Some(Http2Sizes { stream_window, connection_window, max_frame })))
            }
            _ => Err(ValueError::unknown(format!(
                "{accepted}; windows take 1 to {MAX_WINDOW} bytes, frames 16384 to 16777215"
            ))),
        }
    }

    /// Parses a list of settings, which a run measures side by side.
    pub(crate) fn parse_list(text: &str) -> Result<List<Self>, ValueError> {
        match parse_set(text, Self::parse)? {
            list if list.0.len() > MOST_SETTINGS => {
                Err(ValueError(format!("{} settings; accepted: at most {MOST_SETTINGS}", list.0.len())))
            }
            list => Ok(list),
        }
    }

    /// Returns the name of the setting: `default`, `tuned`, or the sizes as the command line takes them.
    pub(crate) fn name(self) -> String {
        match self.0 {
            None => "default".to_owned(),
            Some(_) if self == Self::TUNED => "tuned".to_owned(),
            Some(sizes) => format!("{}/{}/{}", sizes.stream_window, sizes.connection_window, sizes.max_frame),
        }
    }

    /// Applies the settings to `endpoint`.
    pub(crate) fn client(self, endpoint: Endpoint) -> Endpoint {
        match self.0 {
            None => endpoint,
            Some(sizes) => endpoint
                .initial_stream_window_size(sizes.stream_window)
                .initial_connection_window_size(sizes.connection_window)
                .max_frame_size(sizes.max_frame),
        }
    }

    /// Applies the settings to `server`.
    pub(crate) fn server(self, server: Server) -> Server {
        match self.0 {
            None => server,
            Some(sizes) => server
                .initial_stream_window_size(sizes.stream_window)
                .initial_connection_window_size(sizes.connection_window)
                .max_frame_size(sizes.max_frame),
        }
    }
}

impl From<Http2> for String {
    fn from(setting: Http2) -> Self {
        setting.name()
    }
}

impl TryFrom<String> for Http2 {
    type Error = ValueError;

    fn try_from(name: String) -> Result<Self, ValueError> {
        Self::parse(&name)
    }
}

/// Returns `settings` as the command line takes them, and their descriptions for people.
pub(crate) fn describe(settings: &[Http2]) -> (String, String) {
    let joined = |separator: &str, text: fn(&Http2) -> String| {
        settings.iter().map(text).collect::<Vec<_>>().join(separator)
    };
    (joined(",", |setting| setting.name()), joined("; ", Http2::to_string))
}

impl fmt::Display for Http2 {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(sizes) = self.0 else {
            return write!(formatter, "default (tonic's windows and frames)");
        };
        let name = if *self == Self::TUNED { "tuned" } else { "custom" };
        write!(
            formatter,
            "{name} (stream window {}, connection window {}, frames up to {})",
            units::size(sizes.stream_window.into()),
            units::size(sizes.connection_window.into()),
            units::size(sizes.max_frame.into()),
        )
    }
}

/// The setting `--consume`: the use of a payload by its receiver, before the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Consume {
    /// The usual behaviour in each mode: a gRPC service leaves the bytes as they are, and a receiver of
    /// tensors computes with them.
    #[default]
    Auto,
    /// The largest element in every mode, as in §5.1 of Xue et al., "Fast Distributed Deep Learning over
    /// RDMA" (EuroSys 2019).
    ReduceMax,
    /// Nothing in any mode.
    None,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;

    #[test]
    fn settings_are_read_back() {
        for text in ["default", "tuned", "16MiB/32MiB/256KiB"] {
            let setting = Http2::parse(text).unwrap();
            assert_eq!(Http2::parse(&setting.name()), Ok(setting));
        }
    }

    #[test]
    fn sizes_that_http2_forbids_are_refused() {
        for bad in
            ["", "fast", "1MiB", "1MiB/1MiB", "1MiB/1MiB/1KiB", "2GiB/1MiB/16KiB", "0/1/16384", "a/b/c"]
        {
            assert!(Http2::parse(bad).unwrap_err().to_string().contains("default, tuned"), "{bad:?}");
        }
    }

    #[test]
    fn a_list_has_each_setting_once_and_few_of_them() {
        let list = Http2::parse_list("default, tuned").unwrap();
        assert_eq!(list.0, [Http2::DEFAULT, Http2::TUNED]);
        assert_eq!(describe(&list.0).0, "default,tuned");
        let json = serde_json::to_value(&list).unwrap();
        assert_eq!(
            (&json, serde_json::from_value(json.clone()).ok()),
            (&serde_json::json!(["default", "tuned"]), Some(list))
        );
        let many: Vec<String> = (1..=9).map(|window| format!("{window}/1/16384")).collect();
        for (bad, named) in [("tuned,tuned", "twice"), ("", "empty"), (&many.join(","), "at most 8")] {
            assert!(Http2::parse_list(bad).unwrap_err().to_string().contains(named), "{bad:?}");
        }
    }
}

#[cfg(test)]
mod consume_tests {
    use tonic_rdma_commands::Named as _;

    use super::*;

    #[test]
    fn names_are_read_back() {
        for setting in Consume::value_variants() {
            assert_eq!(Consume::from_str(setting.name(), false), Ok(*setting));
        }
    }
}
