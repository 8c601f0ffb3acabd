//! The limits of native calls, and the values that they take.

use std::time::Duration;

use crate::error::{BadSetting, RdmaError};

/// Limits of native calls: of an [`RdmaServer`](crate::RdmaServer), and of a channel. [`CallConfig::default`]
/// suits most programs.
///
/// These limits hold for calls without HTTP/2. HTTP/2 peers of a server have the limits of the
/// `tonic::transport::Server` that [`RdmaServer::http2`](crate::RdmaServer::http2) takes. Settings of the
/// connection below the calls are in [`Config`](crate::Config).
///
/// Setters take any value. [`validate`](Self::validate) refuses bad ones; servers and channels call it before
/// they use the limits, so that a bad value is an error that names its setting.
///
/// ```
/// use std::time::Duration;
/// use tonic_rdma::{CallConfig, RdmaServer};
///
/// let limits = CallConfig::default()
///     .max_concurrent_streams(1000)
///     .timeout(Duration::from_secs(30)); // for calls without a deadline, too
/// let server = RdmaServer::new().calls(limits);
/// # drop(server);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct CallConfig {
    pub(crate) max_concurrent_streams: u32,
    pub(crate) max_header_list_size: usize,
    pub(crate) stream_window: usize,
    /// `None`: that of the connection's configuration.
    pub(crate) connection_limit: Option<u64>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) max_connection_age: Option<Duration>,
    pub(crate) max_connection_age_grace: Option<Duration>,
    pub(crate) max_connection_idle: Option<Duration>,
    pub(crate) shutdown_grace: Duration,
    pub(crate) send_in_place: bool,
    pub(crate) poll_in_place: bool,
}

impl Default for CallConfig {
    fn default() -> Self {
        Self {
            max_concurrent_streams: 1 << 16,
            max_header_list_size: 16 << 10,
            stream_window: 1 << 20,
            connection_limit: None,
            timeout: None,
            max_connection_age: None,
            max_connection_age_grace: None,
            max_connection_idle: None,
            shutdown_grace: Duration::from_secs(60),
            send_in_place: true,
            poll_in_place: true,
        }
    }
}

impl CallConfig {
    /// Sets the most calls that the peer may have open on one connection, 1 to 1 048 576. Default: 65 536. A
    /// client waits with further calls until one has ended, and so it does if their headers have used up their
    /// share of the [`connection_limit`](Self::connection_limit).
    pub fn max_concurrent_streams(mut self, streams: u32) -> Self {
        self.max_concurrent_streams = streams;
        self
    }

    /// Sets the most bytes of a call's headers (path, authority and metadata) or trailers that this side
    /// accepts, 1024 to 1 048 576. Default: 16 384, as with tonic over HTTP/2. Names and values count with 32
    /// bytes each pair (RFC 9113, 6.5.2).
    ///
    /// The headers of one connection's calls together have a bound as well, a quarter of the
    /// [`connection_limit`](Self::connection_limit), with 1024 bytes for each call and 96 for each pair. Further
    /// calls wait at the client.
    pub fn max_header_list_size(mut self, bytes: usize) -> Self {
        self.max_header_list_size = bytes;
        self
    }

    /// Sets the bytes of one call that the peer may send ahead of the reader, 65 536 to 1 073 741 824.
    /// Default: 1 MiB. A slow reader stops its own call only. A call has at most a sixteenth of the
    /// [`connection_limit`](Self::connection_limit).
    pub fn stream_window(mut self, bytes: usize) -> Self {
        self.stream_window = bytes;
        self
    }

    /// Sets the most bytes of messages that land in registered memory at this side on one connection
    /// ([`GatherBoth`](crate::gather::GatherBoth)), until the application takes them, and the most bytes of
    /// registered memory that it may then keep; 1 MiB to 1 PiB. Default: that of
    /// [`Config::connection_limit`](crate::Config::connection_limit), which a variable sets. Further messages wait
    /// at the peer. A message for which there is no room in one segment lands in parts, which tonic copies. An
    /// application that keeps more gets copies in ordinary memory (`landed_moved_bytes` of
    /// [`CounterSnapshot`](crate::CounterSnapshot)).
    ///
    /// All else that one connection holds for its peer has bounds by this number, too: messages that arrived
    /// and were not read an eighth of it, headers a quarter, and what is queued to be sent, or was not taken by
    /// the peer, a half. Beyond these bounds the peer waits, or the sender does. So a connection holds at most
    /// twice this number of bytes, and some MiB. Calls within a process have another bound: each holds at most a
    /// window and a message in each direction.
    pub fn connection_limit(mut self, bytes: u64) -> Self {
        self.connection_limit = Some(bytes);
        self
    }

    /// Sets the longest time that a server gives a call, with its whole response, 1 ms to a day. Default:
    /// none. The client's own deadline counts if it is shorter. A call that takes longer ends with
    /// DEADLINE_EXCEEDED, and its handler is dropped.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the age from which a server's connection accepts no more calls, 1 ms to a day. Default: none. The
    /// client opens another connection for its next call; calls in flight finish.
    pub fn max_connection_age(mut self, age: Duration) -> Self {
        self.max_connection_age = Some(age);
        self
    }

    /// Sets the time that calls in flight have after the [`max_connection_age`](Self::max_connection_age), 1
    /// ms to a day. Then the server ends the connection. Default: no limit.
    pub fn max_connection_age_grace(mut self, grace: Duration) -> Self {
        self.max_connection_age_grace = Some(grace);
        self
    }

    /// Sets the time without a call after which a server closes a connection in good order, 1 ms to a day.
    /// Default: none.
    pub fn max_connection_idle(mut self, idle: Duration) -> Self {
        self.max_connection_idle = Some(idle);
        self
    }

    /// Sets the time that calls in flight have after a server's shutdown signal, 1 ms to a day. Default: 60
    /// s. Then the server ends native connections, and stops to wait for HTTP/2 connections.
    pub fn shutdown_grace(mut self, grace: Duration) -> Self {
        self.shutdown_grace = grace;
        self
    }

    /// Sets whether content in memory of a [`Pool::for_sending`](tonic_rdma_verbs::memory::Pool::for_sending)
    /// is sent from where it lies. Default: true. The peer READs it, and the right to READ holds for whole
    /// slabs of the pool: the peer is able to read other content of the pool, too. With false the content is
    /// copied, to memory that holds only what is sent on this connection.
    pub fn send_in_place(mut self, in_place: bool) -> Self {
        self.send_in_place = in_place;
        self
    }

    /// Sets whether a server polls a call first where it found the call, before it makes a task of it.
    /// Default: true, which is quicker. A handler that blocks its thread then stops what that thread polls
    /// for. Set this to false for handlers that use `tokio::task::block_in_place` or block in other ways:
    /// each call is a task from its beginning, as over HTTP/2.
    pub fn poll_in_place(mut self, in_place: bool) -> Self {
        self.poll_in_place = in_place;
        self
    }

    /// Checks every limit.
    ///
    /// ```
    /// use tonic_rdma::CallConfig;
    ///
    /// assert!(CallConfig::default().validate().is_ok());
    /// let error = CallConfig::default().max_concurrent_streams(0).validate().unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "CallConfig::max_concurrent_streams is 0: takes a number from 1 to 1048576"
    /// );
    /// ```
    ///
    /// # Errors
    /// A limit has a value that it does not take. The error names the limit and the values that it takes.
    pub fn validate(&self) -> Result<(), RdmaError> {
        number("CallConfig::max_concurrent_streams", u64::from(self.max_concurrent_streams), 1, 1 << 20)?;
        number("CallConfig::max_header_list_size", self.max_header_list_size as u64, 1 << 10, 1 << 20)?;
        number("CallConfig::stream_window", self.stream_window as u64, 64 << 10, 1 << 30)?;
        if let Some(limit) = self.connection_limit {
            number("CallConfig::connection_limit", limit, 1 << 20, 1 << 50)?;
        }
        let times = [
            ("CallConfig::timeout", self.timeout),
            ("CallConfig::max_connection_age", self.max_connection_age),
            ("CallConfig::max_connection_age_grace", self.max_connection_age_grace),
            ("CallConfig::max_connection_idle", self.max_connection_idle),
            ("CallConfig::shutdown_grace", Some(self.shutdown_grace)),
        ];
        times.into_iter().try_for_each(|(limit, time)| time.map_or(Ok(()), |time| up_to_a_day(limit, time)))
    }
}

fn number(limit: &'static str, value: u64, least: u64, most: u64) -> Result<(), RdmaError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(refused(limit, value.to_string(), format!("takes a number from {least} to {most}")))
}

fn up_to_a_day(limit: &'static str, time: Duration) -> Result<(), RdmaError> {
    if (Duration::from_millis(1)..=Duration::from_secs(24 * 3600)).contains(&time) {
        return Ok(());
    }
    Err(refused(limit, format!("{time:?}"), "takes a time from 1 ms to 24 hours".into()))
}

/// Returns the error of the limit named `setting`, which has [`CallConfig`]'s name before it.
fn refused(setting: &'static str, value: String, accepted: String) -> RdmaError {
    BadSetting { setting, variable: "", value, accepted, from_environment: false }.into()
}
