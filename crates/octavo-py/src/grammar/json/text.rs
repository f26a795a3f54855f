//! Strings: lengths, patterns and formats.

use llguidance::derivre::{JsonQuoteOptions, RegexAst};

/// The escapes that an output may have. Characters are written as they are; `\uXXXX` is not needed.
const ESCAPES: &str = "nrbtf\\\"";

/// Which strings a schema allows, before they are quoted.
#[derive(Debug, Clone, Default)]
pub(super) struct Texts {
    /// Each must match.
    pub patterns: Vec<RegexAst>,
    /// The same, of formats: to many validators a format says nothing.
    pub formats: Vec<RegexAst>,
    /// In characters.
    pub min_length: u64,
    pub max_length: Option<u64>,
}

impl Texts {
    /// The texts that are allowed, unquoted.
    pub(super) fn texts(&self) -> RegexAst {
        let mut all = [self.patterns.clone(), self.formats.clone()].concat();
        if self.min_length > 0 || self.max_length.is_some() || all.is_empty() {
            let most = self.max_length.map_or(String::new(), |most| most.to_string());
            all.push(RegexAst::Regex(match (self.min_length, self.max_length) {
                (0, None) => "(?s:.*)".to_owned(),
                (least, _) => format!("(?s:.{{{least},{most}}})"),
            }));
        }
        if all.len() == 1 { all.remove(0) } else { RegexAst::And(all) }
    }
}

/// Unquoted texts as JSON strings.
pub(super) fn quoted(texts: RegexAst) -> RegexAst {
    RegexAst::JsonQuote(Box::new(texts), JsonQuoteOptions { allowed_escapes: ESCAPES.to_owned(), raw_mode: false })
}

/// Any JSON string.
pub(super) fn any_string() -> RegexAst {
    quoted(Texts::default().texts())
}

/// The formats that are kept to, by the most common form of each.
pub(super) const FORMATS: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];

/// The texts of a format.
pub(super) fn format(name: &str) -> Option<RegexAst> {
    const DATE: &str = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)\
                        |02-(0[1-9]|1[0-9]|2[0-8]))";
    const TIME: &str = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
    const BYTE: &str = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
    const LABEL: &str = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?";
    const GROUP: &str = "[0-9a-fA-F]{1,4}";
    let pattern = match name {
        "date" => DATE.to_owned(),
        "time" => TIME.to_owned(),
        "date-time" => format!("{DATE}T{TIME}"),
        "duration" => "P([0-9]{1,6}W|([0-9]{1,6}Y)?([0-9]{1,6}M)?([0-9]{1,6}D)?\
                       (T([0-9]{1,6}H([0-9]{1,6}M)?([0-9]{1,6}S)?|[0-9]{1,6}M([0-9]{1,6}S)?|[0-9]{1,6}S))?)"
            .to_owned(),
        "email" => {
            let word = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,32}";
            format!(r"{word}(\.{word})?@{LABEL}(\.{LABEL}){{1,3}}")
        }
        "hostname" => format!(r"{LABEL}(\.{LABEL}){{0,3}}"),
        "ipv4" => format!(r"({BYTE}\.){{3}}{BYTE}"),
        "ipv6" => format!("({GROUP}:){{7}}{GROUP}|({GROUP}(:{GROUP}){{0,2}})?::({GROUP}(:{GROUP}){{0,2}})?"),
        "uri" => {
            let unit = "([a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})";
            format!(
                r"[a-zA-Z][a-zA-Z0-9+.-]{{0,15}}://{LABEL}(\.{LABEL}){{0,3}}(:[0-9]{{1,5}})?(/{unit}*)*(\?({unit}|[/?])*)?(#({unit}|[/?])*)?"
            )
        }
        "uuid" => "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}".to_owned(),
        _ => return None,
    };
    let pattern = RegexAst::Regex(pattern);
    Some(match name {
        // Every part may be left out, but not all of them.
        "duration" => RegexAst::And(vec![pattern, RegexAst::Regex(".{3,}".to_owned())]),
        _ => pattern,
    })
}
