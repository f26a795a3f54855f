//! Numbers as text: which digits there may be, and which texts lie within bounds.
//!
//! JSON lets a number go on without end, and a model that has begun to repeat a digit does so. So an integer has at most
//! 19 digits, as one of 64 bits does, a fraction 17, as many as tell doubles apart, and an exponent two.

use llguidance::derivre::RegexAst;

/// An integer.
const INTEGER: &str = "-?(0|[1-9][0-9]{0,18})";

/// What may follow the digits before the point.
const FRACTION: &str = r"(\.[0-9]{1,17})?";

/// A number that must not reach a bound has at most this many digits behind the point, and no more than let a double
/// tell it from the bound, which is 15 with those before the point.
const SHORT_FRACTION: usize = 9;
const EXACT_DIGITS: usize = 15;

const EXPONENT: &str = "([eE][+-]?[0-9]{1,2})?";

/// Any digits behind the point, or none: the syntax bounds how many.
const REST: &str = r"(\.[0-9]+)?";

/// Which numbers a schema allows.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Numbers {
    /// Only integers.
    pub whole: bool,
    pub bounds: Vec<Bound>,
    /// Each as coefficient and number of decimal places.
    pub multiples: Vec<(u32, u32)>,
}

/// A side of a range.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Bound {
    pub side: Side,
    pub limit: Decimal,
    /// Whether the limit itself is within.
    pub reach: Reach,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Least,
    Most,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    Inclusive,
    Exclusive,
}

/// A number in decimal digits, without leading or trailing zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Decimal {
    negative: bool,
    /// Before the point; at least one.
    whole: String,
    /// Behind it.
    fraction: String,
}

impl Decimal {
    pub(super) fn of(number: &serde_json::Number) -> Option<Decimal> {
        let text = match number.as_f64() {
            // The shortest digits that name the double, without an exponent.
            Some(double) if !number.is_i64() && !number.is_u64() => format!("{double}"),
            _ => number.to_string(),
        };
        let (negative, digits) = text.strip_prefix('-').map_or((false, text.as_str()), |digits| (true, digits));
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        if whole.is_empty() || !whole.bytes().chain(fraction.bytes()).all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let fraction = fraction.trim_end_matches('0');
        let negative = negative && !(whole == "0" && fraction.is_empty());
        Some(Decimal { negative, whole: whole.to_owned(), fraction: fraction.to_owned() })
    }

    /// Its digits as an integer, and how many of them stand behind the point. `None` for a number that is too long.
    pub(super) fn scaled(&self) -> Option<(u32, u32)> {
        let digits = format!("{}{}", self.whole, self.fraction);
        Some((digits.parse().ok()?, u32::try_from(self.fraction.len()).ok()?))
    }
}

impl Numbers {
    /// The texts of the numbers that are allowed.
    pub(super) fn texts(&self) -> RegexAst {
        let exclusive = self.bounds.iter().filter(|bound| bound.reach == Reach::Exclusive);
        let syntax = match exclusive.map(|bound| bound.limit.whole.len()).max() {
            _ if self.whole => INTEGER.to_owned(),
            Some(digits) if digits < EXACT_DIGITS => {
                let most = SHORT_FRACTION.min(EXACT_DIGITS - digits);
                format!(r"{INTEGER}(\.[0-9]{{1,{most}}})?")
            }
            Some(_) => INTEGER.to_owned(),
            None if self.bounds.is_empty() && self.multiples.is_empty() => format!("{INTEGER}{FRACTION}{EXPONENT}"),
            None => format!("{INTEGER}{FRACTION}"),
        };
        let mut all = vec![RegexAst::Regex(syntax)];
        all.extend(self.limits());
        if all.len() == 1 { all.remove(0) } else { RegexAst::And(all) }
    }

    /// A spelling of each number that is allowed, and of some that are not: one without an exponent or zeros to leave
    /// out. Multiples are not looked at, since validators do not agree on them.
    pub(super) fn spelled(&self) -> RegexAst {
        let fraction = if self.whole { "" } else { r"(\.[0-9]+)?" };
        let bounds = self.bounds.iter().map(|bound| RegexAst::Regex(bound.pattern()));
        RegexAst::And(std::iter::once(RegexAst::Regex(format!("-?(0|[1-9][0-9]*){fraction}"))).chain(bounds).collect())
    }

    /// Bounds and multiples alone.
    pub(super) fn limits(&self) -> Vec<RegexAst> {
        let bounds = self.bounds.iter().map(|bound| RegexAst::Regex(bound.pattern()));
        let multiples = self.multiples.iter().map(|&(coefficient, places)| {
            RegexAst::Concat(vec![RegexAst::Regex("-?".to_owned()), RegexAst::MultipleOf(coefficient, places)])
        });
        bounds.chain(multiples).collect()
    }
}

impl Bound {
    /// A regular expression for the numbers on the right side of the bound.
    fn pattern(&self) -> String {
        let limit = &self.limit;
        let is_zero = limit.whole == "0" && limit.fraction.is_empty();
        let beyond = |most| magnitudes(limit, most, self.reach);
        match (self.side, limit.negative) {
            (Side::Least, false) => or(beyond(Side::Least)),
            (Side::Least, true) => format!("(-({})|[0-9].*)", or(beyond(Side::Most))),
            (Side::Most, true) => format!("-({})", or(beyond(Side::Least))),
            // Minus zero is no less than zero.
            (Side::Most, false) if is_zero && self.reach == Reach::Exclusive => {
                format!("-({})", or(magnitudes(limit, Side::Least, Reach::Exclusive)))
            }
            (Side::Most, false) => format!("(-.*|{})", or(beyond(Side::Most))),
        }
    }
}

fn or(options: Vec<String>) -> String {
    // An option in brackets of its own: nothing matches an empty list.
    if options.is_empty() { r"[^\s\S]".to_owned() } else { format!("({})", options.join("|")) }
}

/// Unsigned numbers from a limit on, or up to it.
fn magnitudes(limit: &Decimal, side: Side, reach: Reach) -> Vec<String> {
    let (whole, digits) = (&limit.whole, limit.whole.len());
    let mut options = Vec::new();
    match side {
        Side::Least => options.push(format!("[1-9][0-9]{{{digits},}}{REST}")),
        Side::Most if digits > 1 => options.push(format!("(0|[1-9][0-9]{{0,{}}}){REST}", digits - 2)),
        Side::Most => {}
    }
    for (place, digit) in whole.bytes().enumerate() {
        // A number of several digits does not begin with 0.
        let first = if place == 0 && digits > 1 { b'1' } else { b'0' };
        if let Some(range) = beside(digit, side, first) {
            options.push(format!("{}{range}[0-9]{{{}}}{REST}", &whole[..place], digits - place - 1));
        }
    }
    options.extend(fractions(&limit.fraction, side, reach).map(|fraction| format!("{whole}{fraction}")));
    options
}

/// The digits beyond one.
fn beside(digit: u8, side: Side, first: u8) -> Option<String> {
    let (from, to) = match side {
        Side::Least => (digit + 1, b'9'),
        Side::Most => (first, digit.wrapping_sub(1)),
    };
    (from <= to).then(|| format!("[{}-{}]", char::from(from), char::from(to)))
}

/// What may follow the digits before the point where those are the limit's own.
fn fractions(limit: &str, side: Side, reach: Reach) -> Option<String> {
    let mut options = Vec::new();
    for (place, digit) in limit.bytes().enumerate() {
        if let Some(range) = beside(digit, side, b'0') {
            options.push(format!("{}{range}[0-9]*", &limit[..place]));
        }
        // A number that stops before the limit's last digit is less than the limit.
        if side == Side::Most && place > 0 {
            options.push(limit[..place].to_owned());
        }
    }
    match (side, reach) {
        (Side::Least, Reach::Inclusive) => options.push(format!("{limit}[0-9]*")),
        (Side::Least, Reach::Exclusive) => options.push(format!("{limit}[0-9]*[1-9][0-9]*")),
        (Side::Most, Reach::Inclusive) => options.push(format!("{limit}0*")),
        (Side::Most, Reach::Exclusive) => {}
    }
    let bare = match (side, reach) {
        (_, Reach::Inclusive) if limit.is_empty() => true,
        (Side::Most, _) => !limit.is_empty(),
        (Side::Least, _) => false,
    };
    // The syntax asks for a digit behind the point, so an empty option does no harm.
    match (options.is_empty(), bare) {
        (true, false) => None,
        (true, true) => Some(String::new()),
        (false, _) => Some(format!(r"(\.({})){}", options.join("|"), if bare { "?" } else { "" })),
    }
}
