//! What a test logs through `tracing`.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tracing_subscriber::fmt::format::FmtSpan;

/// Collects log lines, and a line for the begin and the end of each span.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Returns a log of all threads of this process, which has no other log.
    pub fn of_process() -> Self {
        let log = Self::default();
        tracing::subscriber::set_global_default(log.subscriber()).expect("this process has a log");
        log
    }

    fn subscriber(&self) -> impl tracing::Subscriber + Send + Sync + 'static {
        let writer = self.clone();
        tracing_subscriber::fmt()
            .with_max_level(tracing::Level::DEBUG)
            .with_ansi(false)
            .with_span_events(FmtSpan::NEW | FmtSpan::CLOSE)
            .with_writer(move || writer.clone())
            .finish()
    }

    /// Returns the lines with `text` so far.
    pub fn lines(&self, text: &str) -> Vec<String> {
        self.text().lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
    }

    /// Waits until there are `count` lines with `text`. The caller has a deadline.
    pub async fn has(&self, count: usize, text: &str) {
        while self.lines(text).len() < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Returns the whole log so far.
    pub fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns what `test` logs on this thread.
pub fn logged(test: impl FnOnce()) -> String {
    let log = Log::default();
    logging(&log, test);
    log.text()
}

/// Collects in `log` what `test` logs on this thread.
pub fn logging(log: &Log, test: impl FnOnce()) {
    tracing::subscriber::with_default(log.subscriber(), test);
}
