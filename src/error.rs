//! The error of this package.

use std::error::Error;
use std::fmt::{self, Display};
use std::io;
use std::sync::Arc;

type BoxError = Box<dyn Error + Send + Sync>;

/// The error of this package: what happened, to whom, and what to do.
///
/// [`kind`](Self::kind) is for the program, [`reason`](Self::reason) for people, and the causes are in
/// `source()`. It is
///
/// - what connecting, serving and [`Config`](crate::Config) return,
/// - a source of the `tonic::transport::Error` of a connection that could not be made,
/// - inside the [`std::io::Error`] of a stream whose connection ended early,
/// - a source of the status of a call that this package ended.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use std::error::Error;
/// use tonic::transport::Endpoint;
/// use tonic_rdma::{RdmaConnector, RdmaError, RdmaErrorKind};
///
/// /// Finds the error of this package among the causes of any error.
/// fn find<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a RdmaError> {
///     let inside = error.downcast_ref::<std::io::Error>().and_then(|error| error.get_ref());
///     let found = error.downcast_ref().or_else(|| inside?.downcast_ref());
///     found.or_else(|| error.source().and_then(find))
/// }
///
/// let endpoint = Endpoint::from_static("http://127.0.0.1:1"); // nothing listens there
/// let error = endpoint.connect_with_connector(RdmaConnector::new()).await.unwrap_err();
/// let found = find(&error).expect("an error of tonic-rdma");
/// assert_eq!(found.kind(), RdmaErrorKind::Unreachable);
/// assert!(found.reason().starts_with("connecting to 127.0.0.1:1: Connection refused"), "{found}");
/// # }
/// ```
#[derive(Clone)]
pub struct RdmaError(Arc<Inner>);

struct Inner {
    kind: RdmaErrorKind,
    reason: Box<str>,
    setting: Option<BadSetting>,
    source: Cause,
    /// There was no connection for the call.
    unsent: bool,
}

/// The source of an error.
enum Cause {
    None,
    /// The error that was converted. Its source is the source.
    SourceOf(BoxError),
    Is(BoxError),
}

/// What kind of failure an [`RdmaError`] is, for programs that decide by it.
///
/// ```
/// use tonic_rdma::{Config, RdmaErrorKind};
///
/// let error = Config::default().completion_queues(0).validate().unwrap_err();
/// assert_eq!(error.kind(), RdmaErrorKind::InvalidSetting);
/// assert_eq!(error.variable(), Some("RDMA_COMPLETION_QUEUES"));
/// assert_eq!(
///     error.reason(),
///     "Config::completion_queues is 0: takes a number from 1 to 64 (variable RDMA_COMPLETION_QUEUES)"
/// );
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RdmaErrorKind {
    /// A setting or an environment variable has a value that it does not accept. [`RdmaError::setting`],
    /// [`variable`](RdmaError::variable), [`value`](RdmaError::value) and [`accepted`](RdmaError::accepted)
    /// have the details.
    InvalidSetting,
    /// The argument is no endpoint or has no host, or there is no endpoint.
    InvalidEndpoint,
    /// The address can't be listened on.
    Listen,
    /// The name of the host does not resolve, no address of the host can be connected to, or no endpoint of
    /// the channel is up.
    Unreachable,
    /// Something did not happen in time: a connection, the answer to a ping, or a call.
    Timeout,
    /// The policy requires RDMA, and there is none. The reason says why.
    RdmaRequired,
    /// There is no usable device, or the device ended the connection.
    Device,
    /// The peer's process has ended, or the peer can't be reached any more.
    PeerLost,
    /// The connection or the call was closed, in order, by the peer or by this side.
    Closed,
    /// The connection or the call was reset.
    Reset,
    /// The peer broke the protocol, or says that this side did.
    Protocol,
    /// The peer has not begun with the call, which may be sent again.
    NotProcessed,
    /// A message or metadata exceeds a limit, or there is no memory for it.
    ResourceExhausted,
    /// tonic's transport, which has HTTP/2 and TLS, failed.
    Http2,
    /// This side could not go on for another reason.
    Internal,
}

/// A value that a setting does not accept.
pub(crate) struct BadSetting {
    /// The setter, such as `completion_queues`; with its type before it (`CallConfig::timeout`) if that is
    /// not `Config`.
    pub(crate) setting: &'static str,
    /// The variable of the setting. Empty if there is none.
    pub(crate) variable: &'static str,
    pub(crate) value: String,
    pub(crate) accepted: String,
    /// The value came from the variable, and not from code.
    pub(crate) from_environment: bool,
}

impl RdmaError {
    /// Makes an error, for tests of programs that decide by its kind.
    ///
    /// ```
    /// use std::io;
    /// use tonic_rdma::{RdmaError, RdmaErrorKind};
    ///
    /// // What a stream returns whose peer reset the connection.
    /// let reset = RdmaError::new(RdmaErrorKind::Reset, "the peer gave the connection up: reset");
    /// let error = io::Error::new(io::ErrorKind::ConnectionAborted, reset);
    /// # drop(error);
    /// ```
    pub fn new(kind: RdmaErrorKind, reason: impl Into<Box<str>>) -> Self {
        Self::make(kind, reason.into(), None, Cause::None)
    }

    /// Makes the error with the text and the source of `error`.
    pub(crate) fn of(kind: RdmaErrorKind, error: impl Into<BoxError>) -> Self {
        let error = error.into();
        Self::make(kind, error.to_string().into(), None, Cause::SourceOf(error))
    }

    /// Makes the error of a kind with a reason, whose source is `source`.
    pub(crate) fn because(
        kind: RdmaErrorKind,
        reason: impl Into<Box<str>>,
        source: impl Into<BoxError>,
    ) -> Self {
        Self::make(kind, reason.into(), None, Cause::Is(source.into()))
    }

    /// Makes the error of a call that found no connection.
    pub(crate) fn of_unsent(kind: RdmaErrorKind, reason: String, source: Option<BoxError>) -> Self {
        let source = source.map_or(Cause::None, Cause::Is);
        Self(Arc::new(Inner { kind, reason: reason.into(), setting: None, source, unsent: true }))
    }

    fn make(kind: RdmaErrorKind, reason: Box<str>, setting: Option<BadSetting>, source: Cause) -> Self {
        Self(Arc::new(Inner { kind, reason, setting, source, unsent: false }))
    }

    /// Returns the error that was converted into this one.
    pub(crate) fn converted_from<E: Error + 'static>(&self) -> Option<&E> {
        match &self.0.source {
            Cause::SourceOf(error) => error.downcast_ref(),
            _ => None,
        }
    }

    /// Returns whether no server has begun with the call that this error ended, so that it may be sent again:
    /// the channel had no connection for it, or the server said so ([`RdmaErrorKind::NotProcessed`]).
    #[must_use]
    pub fn may_resend(&self) -> bool {
        self.0.unsent || self.0.kind == RdmaErrorKind::NotProcessed
    }

    /// Returns the kind of failure.
    #[must_use]
    pub fn kind(&self) -> RdmaErrorKind {
        self.0.kind
    }

    /// Returns what happened, to which peer, device or setting, and what to do, in one line. `Display` prints
    /// the same.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.0.reason
    }

    /// Returns the name of the setting with a value that it does not accept: the method of
    /// [`Config`](crate::Config) that sets it, such as `completion_queues`. Limits of calls have the name of
    /// their type before it, such as `CallConfig::timeout`.
    #[must_use]
    pub fn setting(&self) -> Option<&'static str> {
        Some(self.0.setting.as_ref()?.setting)
    }

    /// Returns the environment variable of that setting, such as `RDMA_COMPLETION_QUEUES`, if it has one.
    #[must_use]
    pub fn variable(&self) -> Option<&'static str> {
        self.0.setting.as_ref().map(|bad| bad.variable).filter(|name| !name.is_empty())
    }

    /// Returns the value that the setting does not accept.
    #[must_use]
    pub fn value(&self) -> Option<&str> {
        Some(&self.0.setting.as_ref()?.value)
    }

    /// Returns the values that the setting accepts, in words.
    #[must_use]
    pub fn accepted(&self) -> Option<&str> {
        Some(&self.0.setting.as_ref()?.accepted)
    }
}

impl Display for RdmaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.reason)
    }
}

impl fmt::Debug for RdmaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("RdmaError");
        shown.field("kind", &self.0.kind).field("reason", &self.0.reason);
        if let Some(source) = self.source() {
            shown.field("source", &source);
        }
        shown.finish()
    }
}

impl Error for RdmaError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.0.source {
            Cause::None => None,
            Cause::SourceOf(error) => error.source(),
            Cause::Is(source) => Some(source.as_ref()),
        }
    }
}

/// Errors of one kind and one reason are equal.
impl PartialEq for RdmaError {
    fn eq(&self, other: &Self) -> bool {
        (self.kind(), self.reason()) == (other.kind(), other.reason())
    }
}

impl Eq for RdmaError {}

impl From<BadSetting> for RdmaError {
    fn from(bad: BadSetting) -> Self {
        let BadSetting { setting, variable, value, accepted, from_environment } = &bad;
        let reason = if setting.contains("::") {
            format!("{setting} is {value}: {accepted}")
        } else if *from_environment {
            format!("{variable}={value:?}: {accepted}")
        } else if variable.is_empty() {
            format!("Config::{setting} is {value}: {accepted}")
        } else {
            format!("Config::{setting} is {value}: {accepted} (variable {variable})")
        };
        Self::make(RdmaErrorKind::InvalidSetting, reason.into(), Some(bad), Cause::None)
    }
}

/// Takes the error of this package out of an [`io::Error`] of a stream or a listener. Any other `io::Error`
/// is that of an address that can't be listened on.
impl From<io::Error> for RdmaError {
    fn from(error: io::Error) -> Self {
        match error.get_ref().and_then(|inside| inside.downcast_ref::<Self>()) {
            Some(inside) => inside.clone(),
            None => Self::of(RdmaErrorKind::Listen, error),
        }
    }
}
