//! Parsers of the values that the options of `compare` take.

use tonic_rdma_commands::{List, ValueError, parse_set, units};

use super::modes::mode::Mode;
use super::plan::cell::{MAX_BYTES, MAX_INFLIGHT};
use super::plan::connections::MAX_CONNECTIONS;
use crate::workload::Workload;

/// Parses names of modes.
pub(crate) fn parse_modes(text: &str) -> Result<List<Mode>, ValueError> {
    parse_set(text, |item| {
        let accepted = || Mode::ALL.map(Mode::name).join(", ");
        Mode::from_name(item).ok_or_else(|| ValueError::unknown_name("mode", item, accepted()))
    })
}

/// Parses payload sizes.
pub(crate) fn parse_sizes(text: &str) -> Result<List<u64>, ValueError> {
    parse_set(text, |item| {
        let given = item.to_owned();
        let beyond = |fault| {
            let accepted = format!("1 to {}", units::size(MAX_BYTES));
            Err(ValueError::SizeRange { given: given.clone(), fault, accepted })
        };
        match units::parse_size(item) {
            Ok(0) => beyond("zero"),
            Ok(bytes) if bytes > MAX_BYTES => beyond("too large"),
            Ok(bytes) => Ok(bytes),
            Err(reason) => Err(ValueError::Size { given, reason }),
        }
    })
}

/// Parses names of workloads.
pub(crate) fn parse_workloads(text: &str) -> Result<List<Workload>, ValueError> {
    parse_set(text, |item| {
        let accepted = || Workload::all().map(Workload::name).collect::<Vec<_>>().join(", ");
        Workload::from_name(item).ok_or_else(|| ValueError::unknown_name("workload", item, accepted()))
    })
}

/// Smallest and largest rate, in operations offered each second.
const RATES: std::ops::RangeInclusive<f64> = 0.1..=1e6;

/// Parses rates of an open loop.
pub(crate) fn parse_rates(text: &str) -> Result<List<f64>, ValueError> {
    parse_set(text, |item| match item.parse::<f64>() {
        Ok(rate) if RATES.contains(&rate) => Ok(rate),
        _ => {
            let accepted =
                format!("numbers from {} to {}, operations each second", RATES.start(), RATES.end());
            Err(ValueError::number("rate", item, accepted))
        }
    })
}

/// Parses numbers of calls in flight.
pub(crate) fn parse_inflight(text: &str) -> Result<List<usize>, ValueError> {
    parse_set(text, |item| match item.parse() {
        Ok(calls @ 1..=MAX_INFLIGHT) if item.bytes().all(|byte| byte.is_ascii_digit()) => Ok(calls),
        _ => {
            let accepted = format!("whole numbers from 1 to {MAX_INFLIGHT}");
            Err(ValueError::number("number of calls in flight", item, accepted))
        }
    })
}

/// Parses the largest number of connections.
pub(crate) fn parse_connections(text: &str) -> Result<usize, ValueError> {
    match text.parse() {
        Ok(count @ 1..=MAX_CONNECTIONS) if text.bytes().all(|byte| byte.is_ascii_digit()) => Ok(count),
        _ => {
            let accepted = format!("whole numbers from 1 to {MAX_CONNECTIONS}");
            Err(ValueError::number("number of connections", text, accepted))
        }
    }
}

/// Smallest and largest ratio.
const RATIOS: std::ops::RangeInclusive<f64> = 0.01..=1000.0;

/// Parses a ratio of throughputs, such as `0.5`.
pub(crate) fn parse_ratio(text: &str) -> Result<f64, ValueError> {
    match text.parse::<f64>() {
        Ok(ratio) if RATIOS.contains(&ratio) => Ok(ratio),
        _ => Err(ValueError::unknown(format!("numbers from {} to {}", RATIOS.start(), RATIOS.end()))),
    }
}

/// Parses `yes` or `no`.
pub(crate) fn parse_yes_or_no(text: &str) -> Result<bool, ValueError> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(ValueError::unknown("yes, no")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists() {
        assert_eq!(parse_sizes("64, 4KiB").unwrap().0, [64, 4096]);
        assert_eq!(parse_inflight("1,512").unwrap().0, [1, 512]);
        assert_eq!(parse_rates("0.1,1000, 2.5e4").unwrap().0, [0.1, 1000.0, 25_000.0]);
        assert_eq!(
            parse_workloads("vgg16,skew").unwrap().0.iter().map(|w| w.name()).collect::<Vec<_>>(),
            ["vgg16", "skew"]
        );
        assert_eq!(parse_modes("grpc-uds,grpc-tcp").unwrap().0, [Mode::GrpcUds, Mode::GrpcTcp]);
    }

    #[test]
    fn bad_lists_name_the_culprit() {
        let sizes = |text| parse_sizes(text).unwrap_err().to_string();
        assert!(sizes("64,1024,1KiB").contains("\"1KiB\" is there twice"));
        assert!(sizes("64,,1").contains("empty"));
        assert!(sizes("").contains("empty"));
        assert!(sizes("0").contains("zero"));
        assert!(sizes("3GiB,2TiB").contains("\"2TiB\""));
        assert!(sizes("1025GiB").contains("too large") && sizes("1025GiB").contains("1 TiB"));
        assert!(sizes("99999999999GiB").contains("64 bits"));
        assert!(sizes("4lots").contains("\"4lots\""));
        assert!(parse_inflight("0").unwrap_err().to_string().contains("\"0\""));
        assert!(parse_inflight("+1").unwrap_err().to_string().contains("\"+1\""));
        assert!(parse_inflight("99999999999999999999").unwrap_err().to_string().contains("from 1"));
        assert!(
            parse_modes("grpc-tpc").unwrap_err().to_string().contains("grpc-tcp-tuned, grpc-uds, grpc-rdma")
        );
        let workloads = |text| parse_workloads(text).unwrap_err().to_string();
        assert!(workloads("resnet").contains("\"resnet\"") && workloads("resnet").contains("skew, resnet50"));
        assert!(workloads("gru,gru").contains("twice"));
        for bad in ["0", "-1", "nan", "inf", "2e6", "0.01", "50%", "1k", "1,,2"] {
            assert!(
                parse_rates(bad).unwrap_err().to_string().contains("empty")
                    || parse_rates(bad).unwrap_err().to_string().contains("0.1 to 1000000"),
                "{bad}"
            );
        }
    }

    #[test]
    fn numbers_of_connections_are_bounded() {
        assert_eq!((parse_connections("1"), parse_connections("10000")), (Ok(1), Ok(MAX_CONNECTIONS)));
        for bad in ["", "0", "+1", "-1", "1.5", "10001", "many"] {
            assert!(parse_connections(bad).unwrap_err().to_string().contains("from 1 to 10000"), "{bad}");
        }
    }

    #[test]
    fn ratios_that_make_no_sense_are_refused() {
        assert_eq!((parse_ratio("0.5"), parse_ratio("2")), (Ok(0.5), Ok(2.0)));
        for bad in ["", "0", "-1", "nan", "inf", "half", "50%", "1e9"] {
            assert!(parse_ratio(bad).unwrap_err().to_string().contains("0.01 to 1000"), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_a_parser_panic(text in "[0-9a-zA-Z,. -]{0,40}") {
            let _ = parse_sizes(&text);
            let _ = parse_inflight(&text);
            let _ = parse_connections(&text);
            let _ = parse_modes(&text);
            let _ = parse_workloads(&text);
            let _ = parse_rates(&text);
            let _ = parse_ratio(&text);
            let _ = parse_yes_or_no(&text);
        }

        #[test]
        fn distinct_sizes_are_all_kept(sizes in proptest::collection::hash_set(1..=MAX_BYTES, 1..9)) {
            let sizes: Vec<u64> = sizes.into_iter().collect();
            let text = sizes.iter().map(|bytes| units::size(*bytes)).collect::<Vec<_>>().join(",");
            prop_assert_eq!(parse_sizes(&text).map(|list| list.0), Ok(sizes));
        }
    }
}
